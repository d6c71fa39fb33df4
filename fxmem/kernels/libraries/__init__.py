"""Operators that other packages bring, one file a package."""
