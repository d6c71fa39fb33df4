"""Modules, steps and regions that hypothesis draws."""
