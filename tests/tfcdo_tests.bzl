"""Test files as Bazel targets: one target a file."""

def tfcdo_tests(data = [], exclusive = []):
    """Makes a target of each *_test.py file in the folder of the BUILD file.

    Args:
      data: What the tests read at run time.
      exclusive: The files that start several processes of TensorFlow, which wait for each other
        and so are run while no other test is.
    """
    for file in native.glob(["*_test.py"]):
        native.py_test(
            name = file[:-len(".py")],
            srcs = [file] + native.glob(["*.py"], exclude = ["*_test.py"], allow_empty = True),
            main = file,
            data = data,
            tags = ["exclusive"] if file in exclusive else [],
            imports = ["."],
            python_version = "PY3",
            # 15 minutes before a test that hangs is stopped.
            size = "large",
            deps = [
                "//pip_package:build_wheel",
                "//pip_package:check_wheel",
                "//tests/helpers",
                "//tfcdo:everything",
                "//tools",
            ],
        )
