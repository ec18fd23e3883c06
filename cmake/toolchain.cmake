# Finds the compilers and Python, with errors that say what to install.
if(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux")
    message(FATAL_ERROR "pyggml-spec builds on Linux only so far; this is ${CMAKE_SYSTEM_NAME}.")
endif()

include(CheckLanguage)
foreach(compiler "C;CC" "CXX;CXX")
    list(GET compiler 0 language)
    list(GET compiler 1 variable)
    check_language(${language})
    if(NOT CMAKE_${language}_COMPILER)
        message(FATAL_ERROR "No ${language} compiler was found: install one (Debian and Ubuntu: apt install build-essential) "
                            "or name it in the environment variable ${variable}.")
    endif()
endforeach()

if(NOT CMAKE_BUILD_TYPE)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
enable_language(C)
enable_language(CXX)

find_package(Python COMPONENTS Interpreter REQUIRED)
find_package(Python COMPONENTS Development.Module)
if(NOT Python_Development.Module_FOUND)
    message(FATAL_ERROR "Python.h of ${Python_EXECUTABLE} was not found: install Python's headers "
                        "(Debian and Ubuntu: apt install python3-dev).")
endif()
