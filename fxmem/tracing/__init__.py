"""Everything that runs torch to look at a model: loading, fakes, nodes."""
