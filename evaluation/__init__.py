"""How often fragscope is right, measured on simulated runs that nothing was tuned on: `python -m evaluation`."""
