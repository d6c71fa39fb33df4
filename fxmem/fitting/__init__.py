"""Device meshes and settings with which a step fits the GPU."""
