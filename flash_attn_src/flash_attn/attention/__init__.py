"""What computes attention: the backends, the operators of torch, and the gradients."""
