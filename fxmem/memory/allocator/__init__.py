"""The CUDA caching allocator, simulated: what a step reserves, and where it runs out of memory."""
