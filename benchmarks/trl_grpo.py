"""One optimizer step of GRPO here and in TRL's GRPOTrainer: same weights, prompt, completions, rewards and old log-probs, in one process.

    pip install --no-deps -r benchmarks/requirements-trl.txt
    python benchmarks/trl_grpo.py [--prefix 1024] [--action 64] [--group 8] [--steps 5]

A step is log-probs, loss, backward, clipping and AdamW. TRL runs its own training loop, with generation replaced by the fixed batch and
gradient checkpointing off; its step is timed from its own callbacks. After each of its steps ours takes one in each mode, so that all
meet the same machine. Formulas are set equal: clip 0.2, no KL, mean over actions of the mean over tokens, advantages given. Prints the
median seconds and the ratio TRL / ours of each mode, and the largest difference of the losses over the steps.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from pivotrl.config.schema import MoeConfig, OptimizerConfig, ParallelConfig, TrainConfig
from pivotrl.megatron.trainer import Trainer
from pivotrl.objective.grpo import make_grpo_loss
from pivotrl.objective.microbatch import MicroBatch
from pivotrl.training.batching import train_batch, train_micro_batches
from pivotrl.types import TrainSample

THREADS, VOCAB, LEARNING_RATE, CLIP = 2, 8192, 1e-5, 0.2
MODES = ("padded", "packed", "shared_prefix")


@dataclass(frozen=True, slots=True)
class Group:
    """G sampled actions of one prompt. Suffixes: P = prompt tokens, G = actions, A = tokens of an action."""

    prompt_P: torch.Tensor
    actions_G_A: torch.Tensor
    advantages_G: torch.Tensor
    old_logprobs_G_A: torch.Tensor


@dataclass
class Record:
    """What was measured, step by step."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, seconds: float, loss: float) -> None:
        """One step of one contender."""
        self.seconds.setdefault(name, []).append(seconds)
        self.losses.setdefault(name, []).append(loss)


class FixedBatchTrainer(GRPOTrainer):
    """TRL's trainer on one group of given completions in place of sampled ones."""

    group: Group
    last_loss = 0.0

    def _generate_and_score_completions(self, _inputs: Any) -> dict[str, Any]:
        rows = len(self.group.actions_G_A)
        prompts = self.group.prompt_P.expand(rows, -1)
        return {
            "prompt_ids": prompts,
            "prompt_mask": torch.ones_like(prompts),
            "completion_ids": self.group.actions_G_A,
            "completion_mask": torch.ones_like(self.group.actions_G_A),
            "advantages": self.group.advantages_G,
            "old_per_token_logps": self.group.old_logprobs_G_A,
            "num_items_in_batch": torch.tensor(self.group.actions_G_A.numel()),
        }

    def compute_loss(self, *arguments: Any, **named: Any) -> torch.Tensor:
        """TRL's loss, remembered."""
        loss = super().compute_loss(*arguments, **named)
        self.last_loss = loss.item()
        return loss


class TakeTurns(TrainerCallback):
    """Times TRL's step, then takes ours in every mode."""

    def __init__(self, trl: FixedBatchTrainer, ours: dict[str, tuple[Trainer, MicroBatch]], record: Record) -> None:
        self._trl, self._ours, self._record = trl, ours, record
        self._loss = make_grpo_loss(train_config())
        self._start = 0.0

    def on_step_begin(self, *_arguments: Any, **_named: Any) -> None:
        """Starts TRL's clock."""
        self._start = time.perf_counter()

    def on_step_end(self, *_arguments: Any, **_named: Any) -> None:
        """Stops it, and runs ours."""
        self._record.add("trl", time.perf_counter() - self._start, self._trl.last_loss)
        for name, (trainer, batch) in self._ours.items():
            start = time.perf_counter()
            result = trainer.step([batch], self._loss, temperature=1.0)
            self._record.add(name, time.perf_counter() - start, result.loss)


def main() -> None:
    """Runs the comparison and prints one line per mode."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--prefix", type=int, default=1024)
    parser.add_argument("--action", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        checkpoint_dir = Path(directory) / "model"
        model = write_model(checkpoint_dir)
        group = sample_group(model, arguments)
        record = Record()
        trl = trl_trainer(model, group, arguments, Path(directory))
        ours = {name: our_trainer(checkpoint_dir, group, name) for name in MODES}
        trl.add_callback(TakeTurns(trl, ours, record))
        trl.train()
    theirs = statistics.median(record.seconds["trl"][1:])
    print(f"prefix {arguments.prefix}, action {arguments.action}, G {arguments.group}: TRL {theirs:.2f} s a step")
    for name in MODES:
        median = statistics.median(record.seconds[name][1:])
        gaps = (abs(a - b) for a, b in zip(record.losses[name], record.losses["trl"], strict=True))
        print(f"  {name}: {median:.2f} s, ratio {theirs / median:.2f}, largest difference of the loss {max(gaps):.1e}")


def write_model(directory: Path) -> Qwen3ForCausalLM:
    """A Qwen3 with random weights, also written as a checkpoint directory."""
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(directory)
    return model


def sample_group(model: Qwen3ForCausalLM, arguments: argparse.Namespace) -> Group:
    """Random tokens; old log-probs near the model's, so that ratios differ from 1 and some are clipped."""
    prompt_P = torch.randint(2, VOCAB, (arguments.prefix,))
    actions_G_A = torch.randint(2, VOCAB, (arguments.group, arguments.action))
    with torch.no_grad():
        logits = model(torch.cat([prompt_P.expand(arguments.group, -1), actions_G_A], dim=1), logits_to_keep=arguments.action + 1).logits
    logprobs_G_A = logits[:, :-1].log_softmax(-1).gather(2, actions_G_A.unsqueeze(2)).squeeze(2)
    return Group(prompt_P, actions_G_A, torch.randn(arguments.group), logprobs_G_A + 0.15 * torch.randn_like(logprobs_G_A))


def trl_trainer(model: Qwen3ForCausalLM, group: Group, arguments: argparse.Namespace, directory: Path) -> FixedBatchTrainer:
    """TRL with everything off that is no part of the step, and the formulas of `train_config`."""
    config = GRPOConfig(
        output_dir=str(directory / "trl"),
        per_device_train_batch_size=arguments.group,
        num_generations=arguments.group,
        max_completion_length=arguments.action,
        max_steps=arguments.steps + 1,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=CLIP,
        loss_type="grpo",
        temperature=1.0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCAB)}}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="<eos>")), pad_token="<pad>", eos_token="<eos>")
    prompts = Dataset.from_list([{"prompt": "w2"}] * arguments.group)
    no_rewards = [lambda completions, **_named: [0.0] * len(completions)]
    trainer = FixedBatchTrainer(model=model, reward_funcs=no_rewards, args=config, train_dataset=prompts, processing_class=tokenizer)
    trainer.group = group
    return trainer


def train_config() -> TrainConfig:
    """Eq. 7 without KL; what a step does not read is set to anything."""
    return TrainConfig.model_validate(
        {
            "num_steps": 1,
            "pivots_per_step": 1,
            "group_size": 2,
            "advantage": "mean_std",
            "aggregation": "action",
            "clip": {"low": CLIP, "high": CLIP},
            "kl": {"beta": 0.0},
            "optimizer": {"lr": LEARNING_RATE},
            "micro_batch_tokens": 1,
            "checkpoint_every": 1,
        }
    )


def our_trainer(checkpoint_dir: Path, group: Group, batching: str) -> tuple[Trainer, MicroBatch]:
    """A trainer of its own and the group as one micro-batch."""
    optimizer = OptimizerConfig(lr=LEARNING_RATE)
    trainer = Trainer.from_hf(
        checkpoint_dir, optimizer=optimizer, parallel=ParallelConfig(), moe=MoeConfig(), num_steps=10**6, seed=0, with_reference=False
    )
    prompt = tuple(group.prompt_P.tolist())
    rows = [
        TrainSample("pivot", prompt, tuple(action.tolist()), advantage.item(), tuple(old.tolist()), 1.0)
        for action, advantage, old in zip(group.actions_G_A, group.advantages_G, group.old_logprobs_G_A, strict=True)
    ]
    tokens = len(rows) * (len(prompt) + group.actions_G_A.shape[1])
    (batch,) = train_micro_batches(train_batch(rows), batching=batching, micro_batch_tokens=tokens, skip_zero_variance=True)  # type: ignore[arg-type]
    return trainer, replace(batch, old_logprobs_B_T=batch.behavior_logprobs_B_T)


if __name__ == "__main__":
    main()
