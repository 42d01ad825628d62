"""Log-probs of a few tokens after every hand-over of weights: the engine samples them, the trainer scores them again.

Digests prove what arrived, not what is used: a head packed from older weights, experts left in another layout or a cache of keys and
values would pass them. Every hand-over to an engine that samples goes through here (training/, verbs/reprofile.py); the parity gate
measures more, and less often.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from pivotrl.config.engines import WeightSyncConfig
from pivotrl.identity import derive_seed
from pivotrl.rollouts.engine import Engine, EngineError, GenerationRequest
from pivotrl.training.protocols import PolicyTrainer
from pivotrl.training.scoring import completion_logprobs
from pivotrl.weights.push import HasCensus, SyncReport, push

# Mean over the probe, several times what rounding was seen to give: 5e-6 in float32, 0.03 in bfloat16 against a float32 trainer.
_LIMIT, _ROUNDED_LIMIT = 0.01, 0.2


class WeightsDiffer(RuntimeError):
    """Engine and trainer give the same tokens other probabilities: the engine does not sample from the weights it was sent."""


class WeightProbe:
    """Compares an engine with the trainer whose weights it was just given.

    Args:
        prompt_token_ids: the same real prompt every time, so that a cache of an older policy would be hit.
        seed: the run's; the probe's own sample is drawn at place ("probe",).
    """

    def __init__(self, prompt_token_ids: Sequence[int], config: WeightSyncConfig, *, temperature: float, seed: int) -> None:
        self._config, self._temperature = config, temperature
        self._request = GenerationRequest(tuple(prompt_token_ids), (derive_seed(seed, "probe"),), temperature, max(config.probe_tokens, 1))

    def hand_over(self, trainer: PolicyTrainer, engine: Engine, version: int) -> SyncReport:
        """Pushes the trainer's weights and checks that the engine samples from them.

        Raises:
            ValueError, RuntimeError: as `push` and `check`, for weights that did not arrive or are not used.
        """
        report = push(trainer.named_tensors(), engine, version)
        self.check(engine, trainer)
        return report

    def check(self, engine: Engine, trainer: PolicyTrainer) -> float | None:
        """Mean absolute log-prob difference; None where nothing was compared (no model, no probe, an engine that failed to sample).

        Raises:
            WeightsDiffer: above the recipe's limit, or where a difference is not a number.
        """
        census = engine.weight_census() if isinstance(engine, HasCensus) else None
        if not self._config.probe_tokens or census is None:
            return None
        try:
            ((completion,),) = engine.generate([self._request])
        except EngineError as error:
            # The rollouts that follow will meet the same failure and count it.
            sys.stderr.write(f"the weights of policy version {engine.policy_version} could not be probed: {error}\n")
            return None
        completed = (self._request.prompt_token_ids, completion.token_ids)
        (scored,) = completion_logprobs(trainer, [completed], temperature=self._temperature, micro_batch_tokens=1)
        difference = math.fsum(abs(mine - theirs) for mine, theirs in zip(scored, completion.logprobs, strict=True)) / len(scored)
        limit = self._config.max_logprob_difference or (_ROUNDED_LIMIT if census.is_rounded else _LIMIT)
        if not difference <= limit:
            raise WeightsDiffer(
                f"after the hand-over of policy version {engine.policy_version}, engine and trainer differ by {difference:.4f} in the mean log-prob "
                f"of {len(scored)} tokens; weight_sync.max_logprob_difference allows {limit:g}. The tensors arrived as they were sent, so the engine "
                "uses something older or reads them otherwise (a packed head, experts, its prefix cache)"
            )
        return difference
