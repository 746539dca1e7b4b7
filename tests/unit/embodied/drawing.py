"""A module that loads OpenGL when it is imported, as MuJoCo's do, where the library is missing."""

exec("None.glGetError", {"__name__": "OpenGL.raw.GL._errors"})  # what PyOpenGL raises, in a module of its own
