"""The general path: transformers' own modelling code, with its cache in the worker's pools of KV.

reading     config, class and weights of a checkpoint of any architecture that transformers has
observe     what a model's cache holds in each layer, by a run of a few tokens
places      from that to layer groups, tracks, and the place of each tensor in them
store       reads and writes a step's KV and states in the pools
latents     attention of layers that keep latents, for the flat way
flat, gather            the ways of running a step, fastest first
check       chunked, ragged logits against those of one whole forward pass
choose      the first way whose logits agree

The modules are the steps of one walk, from a checkpoint to a step's logits, each named by its subject, so they lie side
by side; what only latent attention or several ranks need is in rooms of its own.
"""
