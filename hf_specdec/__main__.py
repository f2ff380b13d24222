"""`python -m hf_specdec`: the same as the command `hf-specdec`."""

from hf_specdec.cli.app import main

if __name__ == "__main__":
    main()
