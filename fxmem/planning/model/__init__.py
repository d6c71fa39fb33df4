"""The step with a plan: its storages, peak and cost, computed from the recorded step."""
