"""Every measurement that needs an H200, as a table of jobs and a runner for short visits."""
