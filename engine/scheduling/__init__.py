"""The scheduler: decides what each step computes, and who has which blocks. No torch."""
