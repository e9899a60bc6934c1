// The hard pass of one layer as a Python function: backends/direct.py says when and why.
//
// It asks what plan_cache.py asks, and calls the kernels. It reaches torch through Python's stable interface and DLPack's
// exchange table, so that it needs no header of torch, and one build serves every CPython from 3.11 on.
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

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
// A call without arguments, and the object that it must answer with.
struct Question {
    Ref ask, answer;
};
// An entry of a dictionary, such as a module's, and what it must equal.
struct Setting {
    Ref dictionary, name, value;
};

constexpr size_t MOST = 16;     // weights: a layer has up to 13
constexpr size_t TOGETHER = 2;  // tensors of a check: torch's grows a table, and one of seven takes longer than four of two

struct Direct {
    const Exchange* exchange;
    void (*hard)(const Call*);
    const fastff::Layer* layer;
    Ref owner;  // of the layer
    std::vector<Weight> weights;
    std::vector<Ref> absent;  // the names of parameters that the layer does not have
    std::vector<Ref> checks;  // of the form of x and of the weights, TOGETHER at a time
    std::vector<Question> questions;
    std::vector<Setting> settings;
    Ref activation, allocate, dtype, threads;
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

// Whether x and the weights have the form that they had.
bool are_alike(const Direct& d, const Ref* tensors) {
    size_t left = d.weights.size() + 1;
    for (const Ref& check : d.checks) {
        size_t count = left < TOGETHER ? left : TOGETHER;
        Ref few(PyTuple_New(Py_ssize_t(count)));
        if (!few) return false;
        for (size_t i = 0; i < count; i++) PyTuple_SetItem(few.get(), Py_ssize_t(i), Ref::to(tensors++->get()).release());
        if (Ref(PyObject_Call(check.get(), few.get(), nullptr)).get() != Py_True) return false;
        left -= count;
    }
    return left == 0;
}

// Whether the weights lie where they lay. Their memory is alive for as long as `held` is.
bool hold(const Direct& d, const Ref* weights, Ref* held) {
    for (const Weight& weight : d.weights) {
        DLTensor tensor;
        if (d.exchange->describe(weights++->get(), &tensor) || tensor.data != weight.address) return false;
        PyObject* storage = PyWeakref_GetObject(weight.storage.get());
        // None: it was freed, and another storage lies at its address.
        if (!storage || storage == Py_None || PyMapping_Size(storage) != weight.bytes) return false;
        *held++ = Ref::to(storage);
    }
    return true;
}

// The number of rows of x, if they follow one another and lie inside its storage, which `held` keeps alive; or 0.
int64_t rows_of(const Direct& d, PyObject* x, const DLTensor& tensor, Ref& held) {
    int64_t rows = 1, in = d.layer->in;
    for (int i = tensor.ndim - 2; i >= 0; i--) {
        if (tensor.shape[i] != 1 && tensor.strides[i] != rows * in) return 0;
        rows *= tensor.shape[i];
    }
    held = Ref(PyObject_CallMethodObjArgs(x, d.untyped_storage.get(), nullptr));
    if (!held) return 0;
    Ref address(PyObject_CallMethodObjArgs(held.get(), d.data_ptr.get(), nullptr));
    Py_ssize_t bytes = PyMapping_Size(held.get());
    if (!address || bytes < 0) return 0;
    auto base = static_cast<const char*>(PyLong_AsVoidPtr(address.get()));
    int64_t size = rows * in * (d.layer->dtype == fastff::float32 ? 4 : 2);
    return base && base <= tensor.data && tensor.data + size <= base + bytes ? rows : 0;
}

// An output for x (..., in): (..., out).
Ref new_output(const Direct& d, const DLTensor& x) {
    Ref sizes(PyTuple_New(x.ndim)), strides(PyTuple_New(x.ndim));
    if (!sizes || !strides) return Ref();
    PyTuple_SetItem(sizes.get(), x.ndim - 1, Ref::to(d.out.get()).release());
    PyTuple_SetItem(strides.get(), x.ndim - 1, Ref::to(d.one.get()).release());
    int64_t stride = d.layer->out;
    for (int i = x.ndim - 2; i >= 0; i--) {
        PyTuple_SetItem(sizes.get(), i, PyLong_FromLongLong(x.shape[i]));
        PyTuple_SetItem(strides.get(), i, PyLong_FromLongLong(stride));
        stride *= x.shape[i];
    }
    return Ref(PyObject_CallFunctionObjArgs(d.allocate.get(), sizes.get(), strides.get(), d.dtype.get(), nullptr));
}

Ref run(const Direct& d, PyObject* x, PyObject* parameters, PyObject* activation) {
    std::array<Ref, MOST + 1> tensors, held;
    if (!is_quiet(d) || PyObject_RichCompareBool(activation, d.activation.get(), Py_EQ) != 1 ||
        !find(d, x, parameters, tensors.data()) || !are_alike(d, tensors.data()) ||
        !hold(d, tensors.data() + 1, held.data() + 1))
        return Ref();
    DLTensor from, to;
    if (d.exchange->describe(x, &from)) return Ref();
    int64_t rows = rows_of(d, x, from, held[0]);
    if (rows == 0) return Ref();
    Ref y = new_output(d, from);
    if (!y || d.exchange->describe(y.get(), &to)) return Ref();
    Ref threads(PyObject_CallNoArgs(d.threads.get()));
    if (!threads) return Ref();
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
    PyObject *exchange, *owner, *weights, *absent, *checks, *questions, *settings, *activation, *allocate, *dtype, *threads;
    unsigned long long hard, layer;
    PyTypeObject* tuple = &PyTuple_Type;
    if (!PyArg_ParseTuple(arguments, "OKKOO!O!O!O!O!OOOO", &exchange, &hard, &layer, &owner, tuple, &weights, tuple,
                          &absent, tuple, &checks, tuple, &questions, tuple, &settings, &activation, &allocate, &dtype,
                          &threads))
        return nullptr;
    auto made = std::make_unique<Direct>();
    Direct& d = *made;
    d.exchange = static_cast<const Exchange*>(PyCapsule_GetPointer(exchange, "dlpack_exchange_api"));
    if (!d.exchange) return nullptr;
    if (d.exchange->major != 1 || !d.exchange->describe || PyTuple_Size(weights) > Py_ssize_t(MOST)) Py_RETURN_NONE;
    d.hard = reinterpret_cast<void (*)(const Call*)>(hard);
    d.layer = reinterpret_cast<const fastff::Layer*>(layer);
    d.weights = each(weights, [](PyObject* w) {
        return Weight{item(w, 0), item(w, 1), PyLong_AsVoidPtr(PyTuple_GetItem(w, 2)),
                      PyLong_AsSsize_t(PyTuple_GetItem(w, 3))};
    });
    d.absent = each(absent, Ref::to);
    d.checks = each(checks, Ref::to);
    d.questions = each(questions, [](PyObject* q) { return Question{item(q, 0), item(q, 1)}; });
    d.settings = each(settings, [](PyObject* s) { return Setting{item(s, 0), item(s, 1), item(s, 2)}; });
    d.owner = Ref::to(owner);
    d.activation = Ref::to(activation);
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

PyObject* together(PyObject*, PyObject*) { return PyLong_FromSize_t(TOGETHER); }

PyMethodDef methods[] = {{"make", make, METH_VARARGS, "The function of a layer, or None."},
                         {"together", together, METH_NOARGS, "How many tensors a check is about."},
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_direct", nullptr, 0, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__direct() { return PyModuleDef_Init(&module); }
