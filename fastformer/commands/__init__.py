"""The commands of `fastformer`, one function a module.

The signature of a command is its command line: positional parameters are arguments, keyword-only parameters are flags,
and the docstring is the help. `fastformer.cli` imports the module of the command that was chosen, and no other.
"""
