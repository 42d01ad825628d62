"""Something wrong in one process of a trainer, for a process that will run `pivotrl train` (`Command.fault` of forked_commands.py).

A fault is `layer` (the last tensor parallel rank computes a layer wrongly), `weights` (the last process holds another norm than its replicas),
`replica` (the last process computes a layer wrongly) or `engine` (log-probs a token further).
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any


def inject(fault: str) -> None:
    """Puts the fault into this process, whose place in the trainer is in its environment."""
    import torch

    from pivotrl.megatron import trainer as trainer_module
    from pivotrl.megatron.upstream import parallel_state
    from pivotrl.rollouts.transformers_engine import TransformersEngine

    build_model, from_hf, generate = trainer_module.build_model, trainer_module.Trainer.from_hf, TransformersEngine.generate
    is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1

    def disturbed_model(*arguments: Any, **keywords: Any) -> Any:
        chunks = build_model(*arguments, **keywords)
        is_wrong = is_last if fault == "replica" else parallel_state.get_tensor_model_parallel_rank() == 1
        if is_wrong:
            chunks[0].get_submodule("decoder.layers.1.mlp.linear_fc1").register_forward_hook(
                lambda _module, _inputs, output: (output[0].roll(1, -1), *output[1:])
            )
        return chunks

    def disturbed_trainer(*arguments: Any, **keywords: Any) -> Any:
        made = from_hf(*arguments, **keywords)
        if is_last:
            with torch.no_grad():
                made._policy[0].get_parameter("decoder.layers.0.mlp.linear_fc1.layer_norm_weight").mul_(1.5)
        return made

    if fault in ("layer", "replica"):
        trainer_module.build_model = disturbed_model
    elif fault == "weights":
        trainer_module.Trainer.from_hf = disturbed_trainer
    elif fault == "engine":
        TransformersEngine.generate = lambda self, requests: [
            tuple(replace(one, logprobs=(*one.logprobs[1:], -1.0)) for one in group) for group in generate(self, requests)
        ]
