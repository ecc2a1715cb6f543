"""One torch.distributed backend over the communicators of several vendors."""
