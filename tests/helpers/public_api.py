"""The public functions and classes by name, those of ``training.loader`` included."""

import openmed_nb as nb

NAMESPACES = {"": nb, "training.": nb.training, "runbook.": nb.runbook, "compat.": nb.compat}
PUBLIC = {
    f"{prefix}{name}": value
    for prefix, namespace in NAMESPACES.items()
    for name in sorted(namespace.__all__)
    if callable(value := getattr(namespace, name))
}
LOADER = {"training.loader.settings": nb.training.loader.settings}

# Errors are not called by users, and a cluster and a report start processes.
EXCLUDED = {"OpenMedError", "OpenMedWarning", "cluster", "report"}
CALLABLES = {name: value for name, value in {**PUBLIC, **LOADER}.items() if name not in EXCLUDED}
"""All that a user can call without starting other processes."""
