"""What the compile report compiles: a module a stem, each with `cases(quick)` yielding (title, call)."""
