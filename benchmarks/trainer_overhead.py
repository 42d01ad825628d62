"""What the trainer costs beside megatron-core's own model and beside transformers, on the same batch, all in this process.

    python benchmarks/trainer_overhead.py [--model tiny|small] [--steps 5]

Prints tokens per second of CPU time (wall time means little on a busy machine) and ratios, interleaved step by step. Against
megatron-core: forward and backward of the trainer's log-probs over forward and backward of upstream's model called directly with labels,
loss on every token. Against transformers: an optimizer step, once with loss on every token and once on the last fifth only, as a rollout
has it: transformers projects every position to the vocabulary, the trainer those with loss.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from pivotrl.config.schema import MoeConfig, OptimizerConfig, ParallelConfig
from pivotrl.megatron.hf_checkpoint import read_config
from pivotrl.megatron.hf_weights import load_hf
from pivotrl.megatron.logprobs import token_scores
from pivotrl.megatron.model import build_model
from pivotrl.megatron.trainer import Trainer
from pivotrl.objective.microbatch import LossTerms, MicroBatch


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and a batch. Suffixes: B = sequences, T = tokens of a sequence."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    ffn_size: int
    batch_B: int
    tokens_T: int


SHAPES = {
    "tiny": Shape(1024, 128, 4, 4, 2, 384, batch_B=24, tokens_T=200),
    "small": Shape(49152, 576, 6, 9, 3, 1536, batch_B=4, tokens_T=256),
}


def main() -> None:
    """Runs the comparison and prints one line per case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=tuple(SHAPES), default="tiny")
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    shape = SHAPES[arguments.model]
    with tempfile.TemporaryDirectory() as directory:
        checkpoint_dir = write_model(shape, Path(directory))
        optimizer = OptimizerConfig(lr=1e-4)
        trainer = Trainer.from_hf(
            checkpoint_dir, optimizer=optimizer, parallel=ParallelConfig(), moe=MoeConfig(), num_steps=10**6, seed=0, with_reference=False
        )
        model = LlamaForCausalLM.from_pretrained(checkpoint_dir, dtype=torch.float32, attn_implementation="sdpa")
        adam = torch.optim.AdamW(model.parameters(), lr=optimizer.lr, weight_decay=0.0)
        batch = make_batch(shape, 1.0)
        (chunk,) = build_model(read_config(checkpoint_dir), ParallelConfig())
        load_hf([chunk], checkpoint_dir)
        seconds = interleave(lambda: scores_pass(chunk, batch), lambda: direct_pass(chunk, batch), arguments.steps)
        ours, direct = (shape.batch_B * shape.tokens_T / second for second in seconds)
        print(
            f"{arguments.model}, forward and backward: log-probs {ours:,.0f} tokens/s, megatron-core called directly {direct:,.0f} tokens/s, "
            f"ratio {ours / direct:.2f}"
        )
        for name, frac in (("loss on every token", 1.0), ("loss on the last fifth", 0.2)):
            batch = make_batch(shape, frac)
            seconds = interleave(lambda b=batch: trainer_step(trainer, b), lambda b=batch: transformers_step(model, adam, b), arguments.steps)
            ours, theirs = (shape.batch_B * shape.tokens_T / second for second in seconds)
            print(f"{arguments.model}, {name}: trainer {ours:,.0f} tokens/s, transformers {theirs:,.0f} tokens/s, ratio {ours / theirs:.2f}")


def write_model(shape: Shape, directory: Path) -> Path:
    """A Llama with random weights, as a checkpoint directory."""
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_key_value_heads,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def make_batch(shape: Shape, action_frac: float) -> MicroBatch:
    """Random tokens with the mask on the last `action_frac` of every sequence."""
    tokens_B_T = torch.randint(0, shape.vocab_size, (shape.batch_B, shape.tokens_T))
    mask_B_T = torch.zeros(shape.batch_B, shape.tokens_T)
    mask_B_T[:, max(1, round(shape.tokens_T * (1 - action_frac))) :] = 1
    ones_B = torch.ones(shape.batch_B)
    lengths_B = torch.full((shape.batch_B,), shape.tokens_T)
    return MicroBatch(tokens_B_T, lengths_B, mask_B_T, ones_B, ones_B, None, None, None, shape.batch_B, int(mask_B_T.sum()))


def scores_pass(chunk: torch.nn.Module, batch: MicroBatch) -> None:
    """Forward and backward of the trainer's log-probs and entropies."""
    chunk.zero_grad()
    token_scores(chunk, batch, temperature=1.0)[0].sum().backward()


def direct_pass(chunk: torch.nn.Module, batch: MicroBatch) -> None:
    """Forward and backward of upstream's model as its own training loop calls it."""
    chunk.zero_grad()
    tokens_B_T = batch.token_ids_B_T
    positions_B_T = torch.arange(tokens_B_T.shape[1]).expand_as(tokens_B_T)
    losses_B_T = chunk(tokens_B_T, positions_B_T, None, labels=tokens_B_T.roll(-1, dims=1))
    losses_B_T[:, :-1].sum().backward()


def trainer_step(trainer: Trainer, batch: MicroBatch) -> None:
    """Cross entropy through the trainer."""

    def loss(logprobs_B_T: torch.Tensor, _entropies_B_T: torch.Tensor, batch: MicroBatch) -> LossTerms:
        return LossTerms(-(logprobs_B_T * batch.action_mask_B_T).sum() / batch.num_action_tokens, {})

    trainer.step([batch], loss, temperature=1.0)


def transformers_step(model: LlamaForCausalLM, adam: torch.optim.Optimizer, batch: MicroBatch) -> None:
    """The same step as a user of transformers writes it."""
    adam.zero_grad()
    logits_B_T_V = model(batch.token_ids_B_T, use_cache=False).logits
    targets_B_T = batch.token_ids_B_T.masked_fill(batch.action_mask_B_T == 0, -100)
    torch.nn.functional.cross_entropy(logits_B_T_V[:, :-1].flatten(0, 1), targets_B_T[:, 1:].flatten()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    adam.step()


def interleave(ours: Callable[[], None], theirs: Callable[[], None], steps: int) -> tuple[float, float]:
    """Median CPU seconds of each after one warm-up, taken in turns so that both meet the same machine."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for step in range(steps + 1):
        for run, taken in zip((ours, theirs), seconds, strict=True):
            start = time.process_time()
            run()
            if step > 0:
                taken.append(time.process_time() - start)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


if __name__ == "__main__":
    main()
