"""BootSeer: measure and remove the startup time of GPU training jobs.

    import bootseer

    with bootseer.stage("environment_setup.install", packages=12):
        ...
    bootseer.training_began()

Without a `bootseer run` around the process both cost nothing and do nothing.
"""

from bootseer.trace.tracer import stage, training_began

__version__ = "0.2.0"
__all__ = ["__version__", "stage", "training_began"]
