// The hard pass of one layer as a Python function: backends/direct.py says when and why.
//
// It asks what plan_cache.py asks, and calls the kernels. It reaches torch through Python's stable interface and DLPack's
// exchange table, so that it needs no header of torch, and one build serves every CPython from 3.11 on.
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "fastff.h"

namespace {

// DLPack 1 (https://dmlc.github.io/dlpack/latest/c_api.html). `data` is the address of the first element.
struct DLTensor {
    const char* data;
    int32_t device_type, device_id, ndim;
    uint8_t type_code, type_bits;
    uint16_t type_lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};
struct Exchange {
    uint32_t major, minor;
    void *previous, *allocate, *from_tensor, *to_tensor;
    int (*describe)(void* tensor, DLTensor*);  // -1 with a Python exception
    void* stream;
};

// A reference that is owned.
class Ref {
   public:
    explicit Ref(PyObject* stolen = nullptr) : object_(stolen) {}
    Ref(Ref&& other) noexcept : object_(other.release()) {}
    Ref& operator=(Ref&& other) noexcept {
        std::swap(object_, other.object_);
        return *this;
    }
    ~Ref() { Py_XDECREF(object_); }
    static Ref to(PyObject* borrowed) {
        Py_XINCREF(borrowed);
        return Ref(borrowed);
    }
    PyObject* get() const { return object_; }
    explicit operator bool() const { return object_ != nullptr; }
    PyObject* release() { return std::exchange(object_, nullptr); }

   private:
    PyObject* object_;
};

// A weight as it was when the function was made.
struct Weight {
    Ref name, storage;  // a weak reference
    const void* address;
    Py_ssize_t bytes;  // of the storage
};
// A test of the form of this many tensors.
struct Check {
    Ref ask;
    Py_ssize_t count;
};
// A call without arguments, and the object that it must answer with.
struct Question {
    Ref ask, answer;
};
// An entry of a dictionary, such as a module's, and what it must equal.
struct Setting {
    Ref dictionary, name, value;
};

constexpr size_t MOST = 16;  // weights: a layer has up to 13
constexpr int MOST_DIMS = 16;
constexpr int64_t ROWS = int64_t(1) << 31;  // from here on the kernels cannot count them

// An input: DLPack's own arrays are torch's, which may free them once the tensor has another number of dimensions.
struct Input {
    const char* data;
    int dims;
    int64_t shape[MOST_DIMS], strides[MOST_DIMS];
};
// The memory of an input, alive.
struct Memory {
    Ref storage;
    const char* base;
    Py_ssize_t bytes;
};

struct Direct {
    const Exchange* exchange;
    void (*hard)(const Call*);
    const fastff::Layer* layer;
    Ref owner;  // of the layer
    std::vector<Weight> weights;
    std::vector<Ref> absent;  // the names of parameters that the layer does not have
    std::vector<Check> checks;  // of x and the weights, in this order
    std::vector<Question> questions;
    std::vector<Setting> settings;
    Ref activation, type, allocate, dtype, threads;  // type: of x
    Ref untyped_storage{PyUnicode_InternFromString("untyped_storage")}, data_ptr{PyUnicode_InternFromString("data_ptr")};
    Ref out, one{PyLong_FromLong(1)};
};

// Below, false and null mean: no case for it, or, if one is set, a Python exception.

// Whether nothing stands in the way: gradients, a tracer, another backend.
bool is_quiet(const Direct& d) {
    for (const Question& question : d.questions)
        if (Ref(PyObject_CallNoArgs(question.ask.get())).get() != question.answer.get()) return false;
    for (const Setting& setting : d.settings) {
        PyObject* value = PyDict_GetItemWithError(setting.dictionary.get(), setting.name.get());
        if (!value || PyObject_RichCompareBool(value, setting.value.get(), Py_EQ) != 1) return false;
    }
    return true;
}

// x and the weights, if the layer still has the parameters that it had.
bool find(const Direct& d, PyObject* x, PyObject* parameters, Ref* tensors) {
    if (!PyDict_Check(parameters)) return false;
    for (const Ref& name : d.absent)
        if (PyDict_GetItemWithError(parameters, name.get()) != Py_None) return false;
    *tensors++ = Ref::to(x);
    for (const Weight& weight : d.weights) {
        *tensors = Ref::to(PyDict_GetItemWithError(parameters, weight.name.get()));
        if (!*tensors++) return false;
    }
    return true;
}

// As exchange->describe, without an exception: some tensors cannot be described, and the general way knows what to do.
bool describe(const Direct& d, PyObject* tensor, DLTensor& to) {
    if (d.exchange->describe(tensor, &to) == 0) return true;
    PyErr_Clear();
    return false;
}

bool describe(const Direct& d, PyObject* x, Input& to) {
    DLTensor tensor;
    if (!describe(d, x, tensor) || tensor.ndim < 1 || tensor.ndim > MOST_DIMS) return false;
    to.data = tensor.data;
    to.dims = tensor.ndim;
    std::copy_n(tensor.shape, tensor.ndim, to.shape);
    std::copy_n(tensor.strides, tensor.ndim, to.strides);
    return true;
}

// The memory of x, if x has any.
bool find_memory(const Direct& d, PyObject* x, Memory& to) {
    to.storage = Ref(PyObject_CallMethodObjArgs(x, d.untyped_storage.get(), nullptr));
    Ref address(to.storage ? PyObject_CallMethodObjArgs(to.storage.get(), d.data_ptr.get(), nullptr) : nullptr);
    to.bytes = address ? PyMapping_Size(to.storage.get()) : -1;
    if (to.bytes >= 0) to.base = static_cast<const char*>(PyLong_AsVoidPtr(address.get()));
    if (!PyErr_Occurred()) return to.base;
    if (PyErr_ExceptionMatches(PyExc_RuntimeError)) PyErr_Clear();  // torch says that it has none
    return false;
}

// Whether x and the weights have the form that they had.
bool are_alike(const Direct& d, const Ref* tensors) {
    for (const Check& check : d.checks) {
        Ref few(PyTuple_New(check.count));
        if (!few) return false;
        for (Py_ssize_t i = 0; i < check.count; i++)
            PyTuple_SetItem(few.get(), i, Ref::to(tensors++->get()).release());
        if (Ref(PyObject_Call(check.ask.get(), few.get(), nullptr)).get() != Py_True) return false;
    }
    return true;
}

// Whether the weights lie where they lay. Their memory is alive for as long as `held` is.
bool hold(const Direct& d, const Ref* weights, Ref* held) {
    for (const Weight& weight : d.weights) {
        DLTensor tensor;
        if (!describe(d, weights++->get(), tensor) || tensor.data != weight.address) return false;
        PyObject* storage = PyWeakref_GetObject(weight.storage.get());
        // None: it was freed, and another storage lies at its address.
        if (!storage || storage == Py_None || PyMapping_Size(storage) != weight.bytes) return false;
        *held++ = Ref::to(storage);
    }
    return true;
}

// The number of rows of x, if they follow one another and lie inside its memory; or 0.
int64_t rows_of(const Direct& d, const Input& x, const Memory& memory) {
    int64_t rows = 1, in = d.layer->in;
    for (int i = x.dims - 2; i >= 0; i--) {
        if ((x.shape[i] != 1 && x.strides[i] != rows * in) || x.shape[i] >= ROWS) return 0;
        rows *= x.shape[i];
        if (rows >= ROWS) return 0;
    }
    int64_t size = rows * in * (d.layer->dtype == fastff::float32 ? 4 : 2);
    return memory.base <= x.data && x.data + size <= memory.base + memory.bytes ? rows : 0;
}

// Puts an object, which is taken, or is null with an exception.
bool put(const Ref& tuple, int i, PyObject* object) { return object && PyTuple_SetItem(tuple.get(), i, object) == 0; }

// An output for x (..., in): (..., out).
Ref new_output(const Direct& d, const Input& x) {
    Ref sizes(PyTuple_New(x.dims)), strides(PyTuple_New(x.dims));
    if (!sizes || !strides) return Ref();
    put(sizes, x.dims - 1, Ref::to(d.out.get()).release());
    put(strides, x.dims - 1, Ref::to(d.one.get()).release());
    int64_t stride = d.layer->out;
    for (int i = x.dims - 2; i >= 0; i--) {
        if (!put(sizes, i, PyLong_FromLongLong(x.shape[i])) || !put(strides, i, PyLong_FromLongLong(stride)))
            return Ref();
        stride *= x.shape[i];
    }
    return Ref(PyObject_CallFunctionObjArgs(d.allocate.get(), sizes.get(), strides.get(), d.dtype.get(), nullptr));
}

Ref run(const Direct& d, PyObject* x, PyObject* parameters, PyObject* activation) {
    std::array<Ref, MOST + 1> tensors;
    std::array<Ref, MOST> held;
    Memory memory;
    // What may run Python comes first, as the questions do in a torch function mode: it may change x. So may another
    // thread at any time after that, which is why x is described once.
    if (!is_quiet(d) || PyObject_RichCompareBool(activation, d.activation.get(), Py_EQ) != 1) return Ref();
    Ref threads(PyObject_CallNoArgs(d.threads.get()));
    if (!threads || !Py_IS_TYPE(x, reinterpret_cast<PyTypeObject*>(d.type.get())) || !find_memory(d, x, memory))
        return Ref();
    Input from;
    // Torch's check ends the process for a nested tensor. It cannot be described, either.
    if (!find(d, x, parameters, tensors.data()) || !describe(d, x, from) || !are_alike(d, tensors.data()) ||
        !hold(d, tensors.data() + 1, held.data()))
        return Ref();
    int64_t rows = rows_of(d, from, memory);
    if (rows == 0) return Ref();
    Ref y = new_output(d, from);
    DLTensor to;
    if (!y || !describe(d, y.get(), to)) return Ref();
    Call call = {d.layer, from.data, nullptr, const_cast<char*>(to.data), rows, PyLong_AsLong(threads.get())};
    if (call.threads < 1) return Ref();
    Py_BEGIN_ALLOW_THREADS;
    d.hard(&call);
    Py_END_ALLOW_THREADS;
    return y;
}

constexpr char CAPSULE[] = "fastff.direct";

PyObject* call(PyObject* capsule, PyObject* const* arguments, Py_ssize_t count) {
    auto direct = static_cast<const Direct*>(PyCapsule_GetPointer(capsule, CAPSULE));
    if (!direct) return nullptr;
    if (count != 3) {
        PyErr_Format(PyExc_TypeError, "expected x, parameters and activation; got %zd arguments.", count);
        return nullptr;
    }
    Ref y = run(*direct, arguments[0], arguments[1], arguments[2]);
    return y || PyErr_Occurred() ? y.release() : Ref::to(Py_None).release();
}

PyMethodDef call_method = {"direct", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)), METH_FASTCALL,
                           "(x, parameters, activation): the hard pass of x, or None if this is no case for it."};

// [f(item) for item in tuple]
template <class F>
auto each(PyObject* tuple, F&& f) {
    std::vector<decltype(f(tuple))> made;
    for (Py_ssize_t i = 0, n = PyTuple_Size(tuple); i < n; i++) made.push_back(f(PyTuple_GetItem(tuple, i)));
    return made;
}
Ref item(PyObject* tuple, Py_ssize_t i) { return Ref::to(PyTuple_GetItem(tuple, i)); }

// The arguments are those of direct.py.
PyObject* make(PyObject*, PyObject* arguments) {
    PyObject *exchange, *owner, *weights, *absent, *checks, *questions, *settings;
    PyObject *activation, *type, *allocate, *dtype, *threads;
    unsigned long long hard, layer;
    PyTypeObject* tuple = &PyTuple_Type;
    if (!PyArg_ParseTuple(arguments, "OKKOO!O!O!O!O!OOOOO", &exchange, &hard, &layer, &owner, tuple, &weights, tuple,
                          &absent, tuple, &checks, tuple, &questions, tuple, &settings, &activation, &type, &allocate,
                          &dtype, &threads))
        return nullptr;
    constexpr char API[] = "dlpack_exchange_api";
    if (!PyCapsule_IsValid(exchange, API)) Py_RETURN_NONE;
    auto made = std::make_unique<Direct>();
    Direct& d = *made;
    d.exchange = static_cast<const Exchange*>(PyCapsule_GetPointer(exchange, API));
    if (d.exchange->major != 1 || !d.exchange->describe || PyTuple_Size(weights) > Py_ssize_t(MOST)) Py_RETURN_NONE;
    d.hard = reinterpret_cast<void (*)(const Call*)>(hard);
    d.layer = reinterpret_cast<const fastff::Layer*>(layer);
    d.weights = each(weights, [](PyObject* w) {
        return Weight{item(w, 0), item(w, 1), PyLong_AsVoidPtr(PyTuple_GetItem(w, 2)),
                      PyLong_AsSsize_t(PyTuple_GetItem(w, 3))};
    });
    d.absent = each(absent, Ref::to);
    d.checks = each(checks, [](PyObject* c) { return Check{item(c, 0), PyLong_AsSsize_t(PyTuple_GetItem(c, 1))}; });
    d.questions = each(questions, [](PyObject* q) { return Question{item(q, 0), item(q, 1)}; });
    d.settings = each(settings, [](PyObject* s) { return Setting{item(s, 0), item(s, 1), item(s, 2)}; });
    d.owner = Ref::to(owner);
    d.activation = Ref::to(activation);
    d.type = Ref::to(type);
    d.allocate = Ref::to(allocate);
    d.dtype = Ref::to(dtype);
    d.threads = Ref::to(threads);
    d.out = Ref(PyLong_FromLongLong(d.layer->out));
    if (PyErr_Occurred()) return nullptr;
    Ref capsule(PyCapsule_New(made.get(), CAPSULE, [](PyObject* capsule) {
        delete static_cast<Direct*>(PyCapsule_GetPointer(capsule, CAPSULE));
    }));
    if (!capsule) return nullptr;
    made.release();
    return PyCFunction_NewEx(&call_method, capsule.get(), nullptr);
}

PyMethodDef methods[] = {{"make", make, METH_VARARGS, "The function of a layer, or None."},
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_direct", nullptr, 0, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__direct() { return PyModuleDef_Init(&module); }
