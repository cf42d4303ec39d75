"""End-to-end measurements of the served model on a GPU machine."""
