"""One file for each Triton kernel; `reference.py` defines in plain torch what each must compute."""
