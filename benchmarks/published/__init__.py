"""Memory that others measured on real GPUs and published, predicted anew.

    python -m benchmarks.published [--only TEXT] [--record] [-o docs/results/cuda.md]

Each source is a data file, tests/data/cuda/published/NAME.json, and a module of the same name in
``benchmarks/published/sources`` with its models, written anew. The data are facts: who measured,
where it is published (repository, commit, file), GPU, torch, configuration, bytes. The module has
one function, ``predict(case)``, which gives a figure for each that was measured, by its name.

The fields of a data file are those of :class:`benchmarks.published.cases.Case`.
A configuration is classified before anything is predicted: *stated* wherever the source says all
that memory depends on (the version of torch may be inferred), *inferred* where a part of it was
concluded from elsewhere (listed in ``inferred``), *weak* where something could not be known.
"""
