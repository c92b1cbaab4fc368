"""Operations: one name each, with its schema and its CPU implementation, which is also the oracle of the kernel."""
