"""The memory of a step over time: events, live intervals, the peak, and the caching allocator."""
