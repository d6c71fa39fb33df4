"""Fake tensors in place of real ones: what is known of their values, devices and owners."""
