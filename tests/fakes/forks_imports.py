"""What the server of forks.py imports before it forks: all that `pivotrl` commands import."""

from __future__ import annotations

import torch

import pivotrl.cli
import pivotrl.rollouts.transformers_engine
import pivotrl.verbs.train  # noqa: F401
from pivotrl.megatron import bridge

bridge.import_bridge()
torch.set_num_threads(1)
