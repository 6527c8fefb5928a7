"""Operations whose result for a token does not depend on the batch: the kernels of both engines."""
