"""One test file, one target."""

def tfcdo_test(name, deps = [], size = "large", **kwargs):
    """A test file that sees tfcdo and its sibling helper modules.

    Args:
      name: The file's name without ".py".
      deps: What the test imports beside tfcdo: a helper in this folder, a room of tfcdo.
      size: Bazel's size, by default "large": 15 minutes before a hanging test is stopped.
      **kwargs: Passed on to py_test.
    """
    native.py_test(
        name = name,
        srcs = [name + ".py"],
        imports = ["."],
        python_version = "PY3",
        size = size,
        deps = ["//tfcdo"] + deps,
        **kwargs
    )
