"""Modules: parameters plus one call into ops. torch.nn's names, signatures and state_dict keys."""
