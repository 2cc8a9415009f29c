"""`python -m meshwright`, for launchers such as torchrun."""

from meshwright.cli.main import main

main()
