"""fragscope: names the cause when vLLM fails although memory looks free."""

__version__ = "0.1.0"
