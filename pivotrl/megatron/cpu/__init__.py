"""The CPU platform of megatron-core: used where no CUDA device is usable, never loaded elsewhere.

Three parts, installed once by `pivotrl.megatron.platform.activate`: `torch_proxy` (what modules named megatron.* see as `torch`),
`upstream_patches` (the few upstream functions that ask for a CUDA tensor by name) and `transformer_engine` (stand-ins for the
layers upstream takes from transformer-engine, made of `layers` and upstream's own parallel linears).
"""
