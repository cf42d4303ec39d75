"""Pack a BF16 DFlash2 drafter as EXL3: `python -m glm_exl3.drafter SOURCE OUT`.

Why packed: the drafter is read once per step, so its bytes are a fixed part of every step. Why here
and not downloaded: the licence of the public drafter lets nobody pass converted weights on, so
everybody converts their own copy.

`recipe` says what is packed, `hessian` what the inputs look like, `work` keeps finished matrices so
that a killed run goes on, `finish` makes the folder. What must stay true: a folder under the final
name is complete; key and value projections and everything that is not packed keep their bytes.
"""
