"""Train one PyTorch job over AI chips of different vendors and generations.

The chain probe -> profile -> plan -> launch -> report is in the modules of those names; `model.py`
holds every noun that crosses from one step to the next.
"""

__version__ = "0.1.0"
