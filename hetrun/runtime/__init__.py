"""The worker side: what torchrun starts on every host. Standard library and torch only; entry points are `worker.py` and `bench.py`."""
