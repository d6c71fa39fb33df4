"""Pictures of the graph of a step, and the graph itself for networkx."""
