"""Make recoded matrices once: `python -m glm_exl3.recode`."""
