"""Passes over a ``torch.fx.GraphModule`` of the user's own."""
