"""The programs that Triton compiles for a GPU, for the signatures that serving uses, made without a GPU.

    python -m testing.kernels.programs --json programs.json      # the whole grid, this interpreter's Triton

| module | holds |
|---|---|
| `models` | shapes of published models, and what else decides the types of a step |
| `launches` | one call of every op, with a model's shapes and memory layout |
| `recorder` | a pretended GPU that writes down what Triton would compile |
| `assembly` | compiles one such program; counts its registers, spills and instructions |
| `rules` | what a program must and must not contain |
| `exemptions` | the programs that break a rule, with the reasons |
| `grid` | compiles many programs, and sums the results up by kernel |
"""
