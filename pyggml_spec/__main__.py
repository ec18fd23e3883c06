"""`python -m pyggml_spec`: the same program as `pyggml-spec`."""

from pyggml_spec.cli import main

if __name__ == "__main__":
    main()
