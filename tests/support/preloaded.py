"""The last that the server of forks imports: a collection in a child needn't look at modules, nor copy their pages."""

import gc

gc.collect()
gc.freeze()
