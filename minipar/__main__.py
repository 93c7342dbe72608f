"""`python -m minipar`: the command line, for torchrun for example."""

from minipar.cli import main

main()
