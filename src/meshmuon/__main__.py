"""`python -m meshmuon` is the `meshmuon` command."""

from meshmuon.cli.main import main

if __name__ == "__main__":
    main()
