"""The engine's log as it grows: found, followed, unwrapped, dated. What a line means is not known here."""
