"""Operations that can overwrite their input, and the step with them in place."""
