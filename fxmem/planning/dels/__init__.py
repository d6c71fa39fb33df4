"""Values kept past their last use, and the variables that hold them."""
