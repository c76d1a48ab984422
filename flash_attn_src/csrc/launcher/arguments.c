/* The arguments of a kernel: what params says, and a Python value as the driver takes it. */
#include "kernel.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(sizeof(void *) == 8, "arguments are packed for a 64-bit machine");

int
parse_params(struct kernel *self)
{
    Py_ssize_t length;
    const char *params = PyUnicode_AsUTF8AndSize(self->params, &length);
    if (params == NULL)
        return 0;
    if (params[0] == 'B' || params[0] == 'K') {
        char *end;
        unsigned long size = strtoul(params + 1, &end, 10);
        if (params[1] < '1' || params[1] > '9' || end != params + length || size > MAX_STRUCTURE) {
            PyErr_Format(PyExc_ValueError, "kernel %s: params %R, %c wants a number of bytes from 1 to %d",
                         self->name_text, self->params, params[0], MAX_STRUCTURE);
            return 0;
        }
        self->structure = (unsigned)size;
        self->whole = params[0] == 'K';
        self->total = self->passed = 1;
        return 1;
    }
    if (length > MAX_PARAMS) {
        PyErr_Format(PyExc_ValueError, "kernel %s: %zd params, at most %d", self->name_text, length,
                     MAX_PARAMS);
        return 0;
    }
    for (Py_ssize_t index = 0; index < length; index++) {
        if (params[index] == '\0' || strchr("PiIfd0", params[index]) == NULL) {
            PyErr_Format(PyExc_ValueError, "kernel %s: params %R, letter %zd is none of P i I f d 0",
                         self->name_text, self->params, index);
            return 0;
        }
        if (params[index] != '0' && self->passed != index) {
            PyErr_Format(PyExc_ValueError, "kernel %s: params %R, a 0 before letter %zd: they come last",
                         self->name_text, self->params, index);
            return 0;
        }
        self->letters[index] = params[index];
        self->total++;
        if (params[index] != '0')
            self->passed++;
    }
    return 1;
}

/* Says which argument could not be converted, in place of Python's own error. */
static void
explain_argument(const struct kernel *self, Py_ssize_t index, PyObject *value)
{
    const char *wanted;
    switch (self->letters[index]) {
    case 'P': wanted = "an address from 0 to 2**64-1, or None"; break;
    case 'i': wanted = "an int of 32 bits"; break;
    case 'I': wanted = "an int of 64 bits"; break;
    case 'f': wanted = "a float of 32 bits"; break;
    default: wanted = "a float of 64 bits"; break;
    }
    if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_OverflowError, "kernel %s: argument %zd is %R, wanted %s", self->name_text, index,
                     value, wanted);
    } else if (PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        PyObject *type = PyObject_Type(value);
        PyErr_Format(PyExc_TypeError, "kernel %s: argument %zd is of %R, wanted %s", self->name_text, index,
                     type, wanted);
        Py_DecRef(type);
    }
}

static int
convert(char letter, PyObject *value, union slot *slot)
{
    switch (letter) {
    case 'P':
        if (value == Py_None) {
            slot->address = 0;
            return 1;
        }
        slot->address = UINT64_OF_PYTHON(value);
        return slot->address != UINT64_MAX || !PyErr_Occurred();
    case 'i': {
        long long number = INT64_OF_PYTHON(value);
        if (number == -1 && PyErr_Occurred())
            return 0;
        slot->i32 = (int32_t)number;
        if (slot->i32 == number)
            return 1;
        PyErr_SetNone(PyExc_OverflowError);
        return 0;
    }
    case 'I': slot->i64 = INT64_OF_PYTHON(value); return slot->i64 != -1 || !PyErr_Occurred();
    default: {
        double number = PyFloat_AsDouble(value);
        if (number == -1.0 && PyErr_Occurred())
            return 0;
        if (letter == 'd') {
            slot->f64 = number;
            return 1;
        }
        slot->f32 = (float)number;
        if (!isinf(slot->f32) || isinf(number))
            return 1;
        PyErr_SetNone(PyExc_OverflowError);
        return 0;
    }
    }
}

int
pack_argument(const struct kernel *self, int index, PyObject *value, union slot *slot)
{
    slot->address = 0; /* a driver that reads all 8 bytes of a shorter argument gets no other memory of the host */
    if (convert(self->letters[index], value, slot))
        return 1;
    explain_argument(self, index, value);
    return 0;
}

long long
leading_argument(const struct kernel *self, const char *what, PyObject *value, long long limit)
{
    long long number = INT64_OF_PYTHON(value);
    if (number >= 0 && number <= limit)
        return number;
    if (!PyErr_Occurred() || PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_OverflowError, "kernel %s: %s is %R, wanted 0 to %lld", self->name_text, what,
                     value, limit);
    }
    return -1;
}
