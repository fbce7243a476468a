"""Random faults in a running cluster under load, and a judge of what clients saw."""

import os
import secrets

# Every process of a run has it: internal calls need one.
os.environ.setdefault("KVRELAY_JOIN_TOKEN", secrets.token_hex())
