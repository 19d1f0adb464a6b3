# What is said of a call whose arguments do not fit.

cdef extern from *:
    """
    /* setup.py puts calls of this where Cython's wrappers leave with the error of arguments that do not fit. The first
       `needed` of `names` are required. The first `given` were given by position; of the others those that were not
       given are NULL in `values`. */
    static void pbn_name_arguments(
        const char *function, Py_ssize_t needed, PyObject **const *names, PyObject *const *values,
        Py_ssize_t given, PyObject *keywords)
    {
        PyObject *type, *value, *trace, *all, *missing, *module = NULL, *said = NULL;
        int failed;

        if (!PyErr_ExceptionMatches(PyExc_TypeError)) return;
        PyErr_Fetch(&type, &value, &trace);
        all = PyList_New(0);
        missing = PyList_New(0);
        failed = all == NULL || missing == NULL;
        for (Py_ssize_t i = 0; !failed && names[i] != NULL; i++) {
            failed = PyList_Append(all, *names[i]) < 0;
            if (!failed && i >= given && i < needed && values[i] == NULL)
                failed = PyList_Append(missing, *names[i]) < 0;
        }
        if (!failed) module = PyImport_ImportModule("pybnorm._names");
        if (module != NULL) {
            if (keywords != NULL) {
                said = PyObject_CallMethod(module, "refused", "sOOO", function, all, missing, keywords);
            } else {
                said = PyObject_CallMethod(module, "refused", "sOO()", function, all, missing);
            }
        }
        Py_XDECREF(all);
        Py_XDECREF(missing);
        Py_XDECREF(module);
        if (said == NULL || said == Py_None) {
            PyErr_Restore(type, value, trace); /* also drops an error of this function's own */
        } else {
            PyErr_SetObject((PyObject *)Py_TYPE(said), said);
            Py_XDECREF(type);
            Py_XDECREF(value);
            Py_XDECREF(trace);
        }
        Py_XDECREF(said);
    }
    """
