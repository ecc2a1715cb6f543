"""Imported once by the fork server, so that a rank starts in milliseconds. Runs no torch operation."""

import torch
import torch._dynamo  # torch.optim loads it on first use, about a second per process
import transformers.modeling_utils  # noqa: F401 - three seconds in every rank that has such a model

import hetrun.runtime.loop  # noqa: F401

torch.set_num_threads(1)
